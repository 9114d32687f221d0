"""What replaces vLLM's symbols: one module a seam. The only part of afdpatch that imports vllm, and only in its modules."""
