"""A precision plan and the one engine that is built of it; nothing is measured."""
