"""What goes over HTTP: pydantic models read requests, msgspec structs write responses."""
