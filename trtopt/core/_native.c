/* What must run without Python's GIL, or for every value that calibration sees. It takes addresses; the modules that call it
   (trtopt/runtime/stretch.py, trtopt/calibration/histogram.py) say what lies there, and keep it alive. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Several versions of a loop, of which the processor's is taken when the module is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch((const void *)(address))
#else
#define FETCH(address) ((void)(address))
#endif

static int addresses(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *values)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, given);
        return 0;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* A stretch: rows of four words. The first is COPY, SAME or a function's address, the others its arguments. */
enum { COPY = 0, SAME = 1 };

typedef int (*function)(int64_t, int64_t, int64_t);

static int done(const int64_t *row, int64_t count)
{
    int result = 0;
    for (; count > 0 && result == 0; count--, row += 4) {
        if (row[0] == COPY)
            memcpy((void *)(intptr_t)row[1], (const void *)(intptr_t)row[2], (size_t)row[3]);
        else if (row[0] == SAME)
            result = *(const int64_t *)(intptr_t)row[1] != row[2];
        else
            result = ((function)(intptr_t)row[0])(row[1], row[2], row[3]);
    }
    return result;
}

static PyObject *hold(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t given)
{
    int64_t value[2];
    if (!addresses(args, given, 2, value))
        return NULL;
    return PyLong_FromLong(done((const int64_t *)(intptr_t)value[0], value[1]));
}

static PyObject *run(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t given)
{
    int64_t value[2];
    int result;
    if (!addresses(args, given, 2, value))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = done((const int64_t *)(intptr_t)value[0], value[1]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

/* Counting |x| in BINS equal bins over [0, 2**exponent). */
enum { BINS = 16384, SPARE = 64, BLOCK = 1 << 11, LINE = 16 };

/* As integers, with the magnitude of negative ones turned round, floats keep their order: -NaN, -inf, ..., inf, NaN. */
static int32_t turned(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

static double as_float(int32_t key)
{
    int32_t bits = turned(key);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

FOR_EACH_PROCESSOR
static void extremes(const int32_t *bits, int64_t size, int32_t *least, int32_t *most)
{
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < size; i++) {
        int32_t key = turned(bits[i]);
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    *least = low;
    *most = high;
}

/* The first bin's values, half of all after a ReLU, go to the spare bins behind the last, in turn: counts that follow each
   other in one place would wait for each other. */
FOR_EACH_PROCESSOR
static void placed(const float *values, int64_t size, float scale, uint16_t *bins)
{
    uint16_t turn = 0;
    for (int64_t i = 0; i < size; i++, turn++) { /* exact: the scale is a power of two */
        uint16_t bin = (uint16_t)(int32_t)(fabsf(values[i]) * scale);
        bins[i] = bin ? bin : (uint16_t)(BINS + turn % SPARE);
    }
}

FOR_EACH_PROCESSOR
static void added(const uint32_t *fresh, int64_t *counts)
{
    for (int i = 0; i < BINS; i++)
        counts[i] += fresh[i];
    for (int i = BINS; i < BINS + SPARE; i++)
        counts[0] += fresh[i];
}

static int64_t counted(const float *values, int64_t size, int64_t exponent, int64_t *counts, uint32_t *fresh,
                       int32_t *least, int32_t *most)
{
    uint16_t *bins = (uint16_t *)(void *)(fresh + BINS + SPARE);
    int64_t before = exponent;
    memset(fresh, 0, (BINS + SPARE) * sizeof *fresh);
    *least = INT32_MAX;
    *most = INT32_MIN;
    for (int64_t start = 0; start < size; start += BLOCK) { /* read from memory once, for all loops */
        int64_t length = size - start < BLOCK ? size - start : BLOCK;
        int32_t low, high, largest;
        extremes((const int32_t *)(const void *)(values + start), length, &low, &high);
        *least = low < *least ? low : *least;
        *most = high > *most ? high : *most;
        largest = high > 0 ? high : 0;
        if (low < 0 && (turned(low) & 0x7FFFFFFF) > largest)
            largest = turned(low) & 0x7FFFFFFF;
        if (largest >= 0x7F800000) /* infinite, or NaN */
            return before;
        int64_t needed = (largest >> 23) - 126; /* as frexp's, of all but subnormals, which lie below the lowest anyway */
        exponent = needed > exponent ? needed : exponent;
        if (exponent > before) /* the counts' range is too small: their owner widens it, and asks again */
            continue;
        placed(values + start, length, ldexpf((float)BINS, (int)-exponent), bins);
        for (int64_t i = 0; i < length; i += LINE) {
            int64_t end = length - i < LINE ? length : i + LINE;
            FETCH((uintptr_t)values + (size_t)(start + i + 2 * BLOCK) * sizeof *values); /* behind the last it does nothing */
            for (int64_t j = i; j < end; j++)
                fresh[bins[j]]++;
        }
    }
    if (exponent == before)
        added(fresh, counts);
    return exponent;
}

static PyObject *count(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t given)
{
    int64_t value[5], reached;
    int32_t least, most;
    if (!addresses(args, given, 5, value))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    reached = counted((const float *)(intptr_t)value[0], value[1], value[2], (int64_t *)(intptr_t)value[3],
                      (uint32_t *)(intptr_t)value[4], &least, &most);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("ddL", as_float(least), as_float(most), (long long)reached);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "run(rows, count): do so many rows; what the last one gave, which is the first that gave something else than 0."},
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL,
     "hold(rows, count): the same without letting the GIL go, for rows that take less time than that may."},
    {"count_within", (PyCFunction)(void (*)(void))count, METH_FASTCALL,
     "count_within(values, size, exponent, counts, scratch): the least and the greatest value, and the exponent that the counts "
     "need; added to them if it is theirs."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
