"""CUDA's caching allocator in plain Python: what a device reserves for given births and deaths, when it runs out."""
