"""The test device ``lag``, and the frame that lets one test run on it and on a real GPU."""
