"""The tests; one folder for each part, `e2e` for all of them together."""
