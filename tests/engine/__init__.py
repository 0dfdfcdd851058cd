"""Tests of the engine: flights, legs, the pump, the ring, the direct way."""
