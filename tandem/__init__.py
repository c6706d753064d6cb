"""Tandem: speculative decoding as services. This package is what the services and the command line share."""
