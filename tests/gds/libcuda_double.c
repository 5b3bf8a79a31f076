/*
 * A stand-in for the CUDA driver library, as much of it as libkvikio asks for.
 *
 * "Device memory" is host memory handed out by double_alloc(). The driver calls know those ranges
 * and no others, so kvikio takes its device path for them: through a bounce buffer, with copies that
 * are counted here. Streams, contexts and events are dummies; every copy is done when it returns.
 *
 * gcc -O2 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda_double.c -lpthread
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long address;
typedef int result;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3 };
enum { MEMORY_TYPE_DEVICE = 2, PAGE = 4096, VERSION = 12000 };

struct range {
    address start;
    size_t bytes;
    struct range *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static long to_device, to_host, delay_us;

static int lookup(address at, struct range *found)
{
    int known = 0;
    pthread_mutex_lock(&lock);
    for (struct range *r = ranges; r; r = r->next)
        if (at >= r->start && at - r->start < r->bytes) {
            known = 1;
            if (found)
                *found = *r;
            break;
        }
    pthread_mutex_unlock(&lock);
    return known;
}

/* ------------------------------------------------------------------ for the tests */

void *double_alloc(size_t bytes)
{
    struct range *r = malloc(sizeof *r);
    void *memory = NULL;
    if (!r || posix_memalign(&memory, PAGE, bytes)) {
        free(r);
        return NULL;
    }
    memset(memory, 0xC5, bytes);
    r->start = (address)(uintptr_t)memory;
    r->bytes = bytes;
    pthread_mutex_lock(&lock);
    r->next = ranges;
    ranges = r;
    pthread_mutex_unlock(&lock);
    return memory;
}

void double_free(void *memory)
{
    pthread_mutex_lock(&lock);
    for (struct range **at = &ranges; *at; at = &(*at)->next)
        if ((*at)->start == (address)(uintptr_t)memory) {
            struct range *gone = *at;
            *at = gone->next;
            memset(memory, 0xDB, gone->bytes); /* whoever still reads it shall see that */
            free(memory);
            free(gone);
            break;
        }
    pthread_mutex_unlock(&lock);
}

long double_to_device(void) { return __sync_fetch_and_add(&to_device, 0); }
long double_to_host(void) { return __sync_fetch_and_add(&to_host, 0); }
void double_delay(long us) { __sync_lock_test_and_set(&delay_us, us); }

static result copy(address target, address source, size_t bytes)
{
    long wait = __sync_fetch_and_add(&delay_us, 0);
    if (wait)
        usleep(wait);
    __sync_fetch_and_add(lookup(target, NULL) ? &to_device : &to_host, (long)bytes);
    memcpy((void *)(uintptr_t)target, (const void *)(uintptr_t)source, bytes);
    return SUCCESS;
}

/* ------------------------------------------------------------------ memory */

result cuPointerGetAttributes(unsigned count, const int *names, void **out, address at)
{
    int known = lookup(at, NULL);
    for (unsigned i = 0; i < count; i++) {
        if (names[i] == ATTRIBUTE_CONTEXT)
            *(void **)out[i] = known ? (void *)1 : NULL;
        else if (names[i] == ATTRIBUTE_DEVICE_POINTER)
            *(address *)out[i] = known ? at : 0;
        else
            *(unsigned *)out[i] = known && names[i] == ATTRIBUTE_MEMORY_TYPE ? MEMORY_TYPE_DEVICE : 0;
    }
    return SUCCESS;
}

result cuPointerGetAttribute(void *out, int name, address at)
{
    if (!lookup(at, NULL))
        return INVALID_VALUE;
    return cuPointerGetAttributes(1, &name, &out, at);
}

result cuMemGetAddressRange_v2(address *start, size_t *bytes, address at)
{
    struct range r;
    if (!lookup(at, &r))
        return INVALID_VALUE;
    if (start)
        *start = r.start;
    if (bytes)
        *bytes = r.bytes;
    return SUCCESS;
}

result cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return posix_memalign(memory, PAGE, bytes) ? OUT_OF_MEMORY : SUCCESS;
}

result cuMemFreeHost(void *memory)
{
    free(memory);
    return SUCCESS;
}

result cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    (void)memory, (void)bytes, (void)flags;
    return SUCCESS;
}

result cuMemHostUnregister(void *memory)
{
    (void)memory;
    return SUCCESS;
}

result cuMemcpyHtoDAsync_v2(address target, const void *source, size_t bytes, void *stream)
{
    (void)stream;
    return copy(target, (address)(uintptr_t)source, bytes);
}

result cuMemcpyDtoHAsync_v2(void *target, address source, size_t bytes, void *stream)
{
    (void)stream;
    return copy((address)(uintptr_t)target, source, bytes);
}

result cuMemcpyAsync(address target, address source, size_t bytes, void *stream)
{
    (void)stream;
    return copy(target, source, bytes);
}

/* ------------------------------------------------------------------ dummies */

#define DUMMY(name, ...) result name(__VA_ARGS__) { return SUCCESS; }
#define HANDLE(name, value, ...) \
    result name(void **made, ##__VA_ARGS__) { *made = (void *)value; return SUCCESS; }
#define NUMBER(name, value, ...) \
    result name(int *out, ##__VA_ARGS__) { *out = value; return SUCCESS; }

NUMBER(cuDriverGetVersion, VERSION)
NUMBER(cuDeviceGetCount, 1)
NUMBER(cuDeviceGet, 0, int ordinal)
NUMBER(cuCtxGetDevice, 0)
NUMBER(cuDeviceGetAttribute, 0, int name, int device)
DUMMY(cuInit, unsigned flags)
DUMMY(cuCtxPushCurrent_v2, void *context)
DUMMY(cuCtxDestroy_v2, void *context)
DUMMY(cuDevicePrimaryCtxRelease_v2, int device)
DUMMY(cuStreamSynchronize, void *stream)
DUMMY(cuStreamDestroy_v2, void *stream)
DUMMY(cuEventDestroy_v2, void *event)
DUMMY(cuEventRecord, void *event, void *stream)
DUMMY(cuEventQuery, void *event)
DUMMY(cuEventSynchronize, void *event)
HANDLE(cuCtxGetCurrent, 1)
HANDLE(cuCtxPopCurrent_v2, 1)
HANDLE(cuCtxCreate_v2, 1, unsigned flags, int device)
HANDLE(cuCtxCreate_v3, 1)
HANDLE(cuCtxCreate_v4, 1)
HANDLE(cuDevicePrimaryCtxRetain, 1, int device)
HANDLE(cuStreamCreate, 2, unsigned flags)
HANDLE(cuEventCreate, 3, unsigned flags)

result cuLaunchHostFunc(void *stream, void (*fn)(void *), void *argument)
{
    (void)stream;
    fn(argument);
    return SUCCESS;
}

result cuGetErrorName(int code, const char **text)
{
    (void)code;
    *text = "DOUBLE";
    return SUCCESS;
}

result cuGetErrorString(int code, const char **text)
{
    (void)code;
    *text = "an error of the test double";
    return SUCCESS;
}
