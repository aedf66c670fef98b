"""Speech to text with Whisper: sounds, windows, requests to the engine, transcripts and their formats."""
