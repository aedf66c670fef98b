"""HTTP data models: pydantic for requests, msgspec structs for responses."""
