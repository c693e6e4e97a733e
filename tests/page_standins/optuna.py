# needs: optuna sqlalchemy
"""Stand-ins for the names that fragments of docs/optuna.md use without defining them."""

url = "sqlite:///study.db"
