"""Programs that ask a real GPU how its driver behaves; they use cuda-bindings alone."""
