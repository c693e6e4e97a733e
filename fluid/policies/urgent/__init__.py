"""Groups that may not wait: which devices are cleared for them."""
