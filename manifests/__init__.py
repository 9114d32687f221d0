"""What people declare: patches, models, vLLM's chain; and what `afdpatch pin` makes of it."""
