"""Train a classifier with skorch, after its quickstart.

unisono run -n 2 examples/skorch_quickstart.py
"""

import numpy as np
from sklearn.datasets import make_classification
from torch import nn

from unisono.skorch import NeuralNetClassifier

X, y = make_classification(1000, 20, n_informative=10, random_state=0)
X = X.astype(np.float32)
y = y.astype(np.int64)


class MyModule(nn.Module):
    def __init__(self, num_units=10):
        super().__init__()
        self.dense0 = nn.Linear(20, num_units)
        self.nonlin = nn.ReLU()
        self.dropout = nn.Dropout(0.5)
        self.dense1 = nn.Linear(num_units, num_units)
        self.output = nn.Linear(num_units, 2)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, X, **kwargs):
        X = self.nonlin(self.dense0(X))
        X = self.dropout(X)
        X = self.nonlin(self.dense1(X))
        return self.softmax(self.output(X))


net = NeuralNetClassifier(
    MyModule,
    max_epochs=10,
    lr=0.1,
    strategy="powersgd(rank=4)",
    # Shuffle training data on each epoch
    iterator_train__shuffle=True,
)
net.fit(X, y)
print("Accuracy:", (net.predict(X) == y).mean())
