"""Airflow provider for LLM batch inference on Ray. Imported on both sides, so it holds only the version."""

__version__ = "0.1.0"
