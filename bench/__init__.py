"""Measurements of Tandem on this machine: what a round costs beside the models, and what a pair of models gains."""
