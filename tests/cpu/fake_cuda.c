// A CUDA driver without a GPU: it hands out handles, and writes down every launch with the bytes of its parameters.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kMapBytes = 128, kInvalidContext = 201, kLogBytes = 1 << 20 };

static _Thread_local void* context;
static uint64_t next_handle = 1000;
static uint8_t log_bytes[kLogBytes];
static uint64_t log_end;
static uint64_t image_bytes;  // that a launch's parameters have
static uint64_t capture;      // in which every stream is; 0: none
static int next_status;       // of the next launch
static int num_refused;      // allocations, from now on
static uint64_t watched_at, watched_size;  // where a launch's parameters have an address, and how many bytes from there
static uint8_t* watched;

// What the tests ask for
uint8_t* fake_log(void) { return log_bytes; }
uint64_t fake_log_end(void) { return log_end; }
void fake_reset(uint64_t num_image_bytes) { log_end = 0, image_bytes = num_image_bytes; }
void fake_fail_next(int status) { next_status = status; }
void fake_refuse_memory(int times) { num_refused = times; }
void fake_capture(uint64_t number) { capture = number; }
void fake_watch(uint64_t at, uint64_t size) { watched_at = at, watched_size = size, watched = realloc(watched, size + 1); }
uint8_t* fake_watched(void) { return watched; }
void fake_drop_context(void) { context = NULL; }

static void put(const void* data, uint64_t size) {
  if (log_end + size > kLogBytes) abort();
  memcpy(log_bytes + log_end, data, size);
  log_end += size;
}

int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { return *value = attribute + device, 0; }
int cuDevicePrimaryCtxRetain(void** found, int device) { return *found = (void*)(uintptr_t)(1 + device), 0; }
int cuCtxGetCurrent(void** found) { return *found = context, 0; }
int cuCtxSetCurrent(void* wanted) { return context = wanted, 0; }
int cuMemsetD8Async(uint64_t address, uint8_t value, size_t size, void* stream) {
  return (void)stream, memset((void*)(uintptr_t)address, value, size), 0;
}
int cuMemsetD32Async(uint64_t address, uint32_t value, size_t count, void* stream) {
  for (size_t index = 0; index < count; ++index) ((uint32_t*)(uintptr_t)address)[index] = value;
  return (void)stream, 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  if (num_refused > 0) return --num_refused, 2;
  return *address = (uintptr_t)malloc(size), 0;
}
int cuStreamCreate(void** stream, unsigned flags) { return *stream = (void*)(uintptr_t)(flags + next_handle++), 0; }
int cuStreamSynchronize(void* stream) { return (void)stream, 0; }
int cuStreamDestroy_v2(void* stream) { return (void)stream, 0; }
int cuStreamGetId(void* stream, uint64_t* number) { return *number = (uintptr_t)stream, capture != 0 ? 900 : 0; }
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* number, void* a, void* b, void* c) {
  (void)stream, (void)a, (void)b, (void)c;
  return *number = capture, *status = capture != 0, 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, 0; }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  (void)code, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  return *library = (void*)(uintptr_t)next_handle++, 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  (void)library, (void)name;
  return *kernel = (void*)(uintptr_t)next_handle++, 0;
}
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) { return (void)attribute, (void)value, (void)kernel, (void)device, 0; }
int cuGetErrorName(int status, const char** text) { return (void)status, *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int status, const char** text) { return (void)status, *text = "made up", 0; }

// A map is a list of everything it was asked for.
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  uint8_t* place = memset(map, 0, kMapBytes);
  int words[] = {type, (int)rank, interleave, swizzle, promotion, fill};
  if ((uintptr_t)map % 64 != 0 || (uintptr_t)address % 16 != 0 || rank != 4) return 1;
  for (uint32_t axis = 0; axis + 1 < rank; ++axis) {
    if (strides[axis] % 16 != 0) return 1;
  }
  memcpy(place, sizes, 32);
  memcpy(place + 32, strides, 24);
  memcpy(place + 56, box, 16);
  memcpy(place + 72, steps, 16);
  memcpy(place + 88, &address, 8);
  memcpy(place + 96, words, 24);
  return 0;
}

int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
                   void** params, void** extra) {
  int status = next_status;
  next_status = 0;
  if (status != 0) return status;
  if (context == NULL) return kInvalidContext;
  uint64_t numbers[] = {(uintptr_t)kernel, gx, gy, gz, bx, by, bz, shared, (uintptr_t)stream, (uintptr_t)extra};
  put(numbers, sizeof(numbers));
  put(params[0], image_bytes);
  if (watched_size != 0) {
    void* address;
    memcpy(&address, (const uint8_t*)params[0] + watched_at, sizeof(address));
    memcpy(watched, address, watched_size);
  }
  return 0;
}

struct Attribute {
  int id, padding, value, rest[15];
};

struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  const struct Attribute* attributes;
  unsigned num_attributes;
};

int cuLaunchKernelEx(const struct Config* config, void* kernel, void** params, void** extra) {
  const unsigned *grid = config->grid, *block = config->block;
  // Programmatic stream serialization, and nothing else
  if (config->num_attributes != 1 || config->attributes->id != 6 || config->attributes->value != 1) return 1;
  return cuLaunchKernel(kernel, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared, config->stream, params, extra);
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* kernel, int num_threads, size_t shared) {
  *blocks = kernel != NULL && num_threads > 0 && shared < (1u << 20);
  return 0;
}
