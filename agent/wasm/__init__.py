"""Wasm extensions: modules that discovery names by URL are fetched by the agent, and Envoy is given a local file."""
