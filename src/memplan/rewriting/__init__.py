"""Run a model by its plan: engines, the module's call, autograd, the torch.compile backend."""
