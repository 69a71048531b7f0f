"""Benchmarks of ai_query's flow control. `python -m benchmarks` runs them all in minutes on two cores."""
