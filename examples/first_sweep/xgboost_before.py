import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

x, x_valid, y, y_valid = train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)
data, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(x_valid, y_valid)
params = {"objective": "binary:logistic", "max_depth": 6, "eta": 0.1}
sets = [(valid, "valid")]
booster = xgboost.train(params, data, 81, evals=sets)
print(booster.predict(valid)[:5])
