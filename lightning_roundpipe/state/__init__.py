"""Everything that lives in host memory: parameters, gradients and the optimizer worker."""
