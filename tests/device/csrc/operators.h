#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>

namespace lag {

// Give a storage other memory of `nbytes`; the bytes that both have in common follow, late.
void resize_storage(c10::StorageImpl* storage, std::size_t nbytes);

}  // namespace lag
