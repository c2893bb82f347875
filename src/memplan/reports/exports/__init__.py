"""Reports of exports to small devices."""
