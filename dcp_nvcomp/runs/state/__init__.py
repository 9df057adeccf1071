"""What a training run has to remember: model, optimizers, schedulers, data loaders, generators of random numbers."""
