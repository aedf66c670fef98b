"""Images, videos and embeddings as inputs: processors, encoders, and their part in the engine core."""
