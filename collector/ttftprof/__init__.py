"""Where the first token of a local LLM server went: an eBPF profiler of model switches."""

__version__ = "0.1.0"
