"""The larger commands: each adds its options, calls theory, practice or course, and prints."""
