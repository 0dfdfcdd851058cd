"""scikit-learn's part: pixels with the same texture and colour become one segment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED = 0
_EVERY = 7  # pixels to fit the clusters to: neighbours tell little more


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one photograph.

    Parameters
    ----------
    labels
        uint8, shape ``(height, width)``: 0 for the largest segment, and so on down.
    pixels
        How many pixels each segment has, in that order.
    variance_kept
        Share of the features' variance in the components that were clustered.
    """

    labels: NDArray[np.uint8]
    pixels: tuple[int, ...]
    variance_kept: float


def segment(features: NDArray[np.floating], *, colours: int, clusters: int = 4, components: int = 8) -> Segments:
    """Cluster the pixels of one photograph by their features.

    Parameters
    ----------
    features
        Shape ``(height, width, channels)``, C-contiguous, so that ``(pixels, channels)`` is a view.
    colours
        How many of the last channels are colours. They get the same total variance as all others together:
        two dozen texture channels would outvote three colours.
    clusters, components
        How many segments; how many principal components they are found in.

    Notes
    -----
    The same features give the same labels: the seed is fixed, and so is the order of the labels.
    """
    from scipy.ndimage import uniform_filter  # type: ignore[import-untyped]
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    height, width, channels = features.shape
    pixels = features.reshape(height * width, channels)
    scaled = StandardScaler().fit_transform(pixels.astype(np.float32))
    scaled[:, -colours:] *= np.sqrt((channels - colours) / colours)
    pca = PCA(min(components, channels), svd_solver="covariance_eigh")
    reduced = pca.fit_transform(scaled)
    kmeans = MiniBatchKMeans(clusters, random_state=SEED, n_init=3, batch_size=4096)
    kmeans.fit(reduced[::_EVERY])
    labels = kmeans.predict(reduced).reshape(height, width)
    # A majority vote among the neighbours drops specks.
    votes = np.stack([uniform_filter((labels == k).astype(np.float32), size=9) for k in range(clusters)])
    smooth = votes.argmax(axis=0)
    sizes = np.bincount(smooth.ravel(), minlength=clusters)
    by_size = np.argsort(-sizes, kind="stable")
    rank = np.empty(clusters, np.uint8)
    rank[by_size] = np.arange(clusters, dtype=np.uint8)
    kept = float(pca.explained_variance_ratio_.sum())
    return Segments(rank[smooth], tuple(int(size) for size in sizes[by_size]), kept)
