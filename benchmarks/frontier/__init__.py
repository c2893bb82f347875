"""What a byte budget costs in time: models, peers and measuring of benchmarks/fit_frontier.py."""
