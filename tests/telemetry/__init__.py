"""Traces, metrics and logs of the running services."""
