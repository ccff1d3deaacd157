"""Objects that refuse stale writers: on S3, Google Cloud Storage, Azure, or in local files.

    objects = FencedObjects(S3Store("reports"))
    with client.lock("july", claims=[objects.claims("2026/july.json")]) as lease:
        objects.put("2026/july.json", body, fence=lease)  # StaleTokenError if a newer holder wrote or claimed it

Needs obstore: pip install 'obstore>=0.9'.
"""

from fenced_store.objects.fenced_objects import AsyncFencedObjects, FencedObjects, Object, StoredObject

__all__ = ["AsyncFencedObjects", "FencedObjects", "Object", "StoredObject"]
