/* Reads a file VARIANT.DTYPE.txt of vectors/, in C99 without a library. docs/checking.md describes it. */
#include <math.h>
#include <stdio.h>
#include <string.h>

struct array {
    char name[16];
    int bits, size, block, count, is_output, is_used;
    float values[8192], lo[8192], hi[8192];
};
struct test { char flag[64]; int id, rows, n, offset, norm, count; double eps; struct array arrays[12]; };

static struct array *find(struct test *t, const char *name) { /* an input, or an output to fill; NULL: there is none */
    for (struct array *a = t->arrays; a < t->arrays + t->count; a++)
        if (!strcmp(a->name, name)) return a->is_used = 1, a;
    return NULL;
}

static void numbers(FILE *file, float *values, int count, int bits, int seed, int exponent) { /* no file: by the hash */
    for (unsigned z, i = 0; i < (unsigned)count; i++) {
        z = (unsigned)seed + i * 0x9E3779B9u, z = (z ^ z >> 16) * 0x85EBCA6Bu, z = (z ^ z >> 13) * 0xC2B2AE35u;
        values[i] = (float)ldexp(((z ^ z >> 16) >> (32 - bits)) - ldexp(1, bits - 1), exponent - bits + 1);
        if (file && fscanf(file, "%x", &z) == 1) memcpy(values + i, &z, sizeof z);
    }
}

static int next(FILE *file, struct test *t) { /* the next test of the file; 0 where there is none, or it is cut off */
    char word[8] = "";
    t->count = 0;
    if (fscanf(file, " test %d %63s %d %d", &t->id, t->flag, &t->rows, &t->n) != 4) return 0;
    if (fscanf(file, "%lf %d %d", &t->eps, &t->offset, &t->norm) != 3) return 0;
    for (struct array *a = t->arrays; fscanf(file, "%7s", word) == 1 && strcmp(word, "end"); a++, t->count++) {
        if (fscanf(file, "%15s %d %d %d %d", a->name, &a->bits, &a->size, &a->block, &a->count) != 5) return 0;
        if (t->count == 12 || a->size > 8192 || (*word != 'h' && a->count > 8192)) return 0; /* none is larger */
        a->is_output = *word == 'o', a->is_used = 0;
        if (*word == 'h') numbers(NULL, a->values, a->size, a->bits, a->block, a->count);
        else numbers(file, a->is_output ? a->lo : a->values, a->count, 24, 0, 0);
        if (a->is_output) numbers(file, a->hi, a->count, 24, 0, 0);
    }
    return !strcmp(word, "end");
}
