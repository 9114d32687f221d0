"""What replaces vLLM's symbols: one module a seam. Only these modules import vllm."""
