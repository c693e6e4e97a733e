"""A recorded run as reports read it: its trials, segments and timeline, and how it is followed."""
