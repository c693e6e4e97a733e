import xgboost
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import fluid.integrations.xgboost

x, x_valid, y, y_valid = train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)
data, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(x_valid, y_valid)
params = {"objective": "binary:logistic", "max_depth": [3, 4, 6, 8], "eta": fluid.search.loguniform(0.01, 0.5)}
sets = [(valid, "valid")]
booster = fluid.integrations.xgboost.train(params, data, 81, evals=sets, metric="valid-logloss").best.load_checkpoint()
print(booster.predict(valid)[:5])
