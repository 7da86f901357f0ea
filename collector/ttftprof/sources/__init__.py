"""Where facts come from: one sampler or tap a file."""
