"""What texts name: targets, losses, optimizers, values of options. The same in the command and in Python."""
