"""Whether a planned step is the step that it was: gradients, buffers, random stream and peak, held against eager."""
