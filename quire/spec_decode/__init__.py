"""Speculative decoding: who guesses a request's next tokens, and how many guesses are worth their step."""
