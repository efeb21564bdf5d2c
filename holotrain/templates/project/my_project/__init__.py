"""The classes that the YAML files in ``conf`` name."""
