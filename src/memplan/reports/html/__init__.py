"""Results as HTML: one small renderer of what the other reports draw."""
