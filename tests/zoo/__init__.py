"""Many architectures, each trained through the pipeline and by plain autograd."""
