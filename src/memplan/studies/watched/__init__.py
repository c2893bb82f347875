"""What `memplan.watch` saw on several ranks, put side by side."""
