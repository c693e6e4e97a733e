"""Which trial goes where: the queue, the rules of placing, lanes, widths."""
