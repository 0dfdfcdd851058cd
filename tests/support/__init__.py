"""What several test modules need: sample values, the reference, the ways through the engine, the value table."""
