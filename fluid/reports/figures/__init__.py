"""Figures: Gantt charts, and those of rehearsals."""
