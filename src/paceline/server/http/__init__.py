"""Requests and answers of any protocol: bodies, errors, keys, streams, traces."""
