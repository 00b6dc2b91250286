"""Train a simple convnet with Keras 3 on torch, after keras.io's MNIST example, on scikit-learn's handwritten digits.

unisono run -n 2 examples/keras_convnet.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
from keras import layers
from sklearn.datasets import load_digits

import unisono.keras

# Model / data parameters
num_classes = 10
input_shape = (8, 8, 1)

# Load the data and split it between train and test sets
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
labels = keras.utils.to_categorical(digits.target, num_classes)
x_train, y_train, x_test, y_test = images[:1500], labels[:1500], images[1500:], labels[1500:]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(64, kernel_size=(2, 2), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)

batch_size = 64
epochs = 5
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
unisono.keras.parallel(model, "powersgd(rank=4)")
model.fit(x_train, y_train, batch_size=batch_size, epochs=epochs, validation_split=0.1)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
