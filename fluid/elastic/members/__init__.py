"""Members of an elastic trial, what they and the driver say to each other, and who coordinates them."""
