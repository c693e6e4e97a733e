import lightgbm
from sklearn.datasets import load_breast_cancer

x, y = load_breast_cancer(return_X_y=True)
data = lightgbm.Dataset(x[:400], y[:400])
valid = [lightgbm.Dataset(x[400:], y[400:], reference=data)]
params = {"objective": "binary", "metric": "auc", "num_leaves": 31, "eta": 0.1}
model = lightgbm.train(params, data, 81, valid)
print((model.predict(x[400:]).round() == y[400:]).mean())
model.save_model("model.txt")
