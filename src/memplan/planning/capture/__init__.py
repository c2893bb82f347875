"""A model's call -> JointGraph."""
