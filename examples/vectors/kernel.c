/* Two kernels, one of which is wrong, judged by files of vectors/:
 *
 *     cc -std=c99 -O2 -o judge examples/vectors/kernel.c -lm
 *     ./judge right vectors/llama.*.txt        prints the count alone
 *     ./judge wrong vectors/llama.*.txt        prints a line for each output that is wrong
 *
 * -DSTATISTIC=float makes the right kernel one that overflows where x is large. */
#include <stdlib.h>

#include "reader.h"
#ifndef STATISTIC
#define STATISTIC double
#endif

static int eps_outside; /* of the root: the mistake */

static double rounded(double v, int bits) { /* to nearest, ties to even, in a format of 8, 11 or 24 bits */
    int exponent, least = bits == 11 ? -13 : -125;
    if (v == 0 || !isfinite(v)) return v;
    frexp(v, &exponent);
    double step = ldexp(1, (exponent < least ? least : exponent) - bits), result = rint(v / step) * step;
    return fabs(result) >= ldexp(1, bits == 11 ? 16 : 128) ? copysign(INFINITY, v) : result;
}

static struct array *need(struct test *t, const char *name) { /* what every test has */
    struct array *a = find(t, name);
    if (!a) fprintf(stderr, "test %d has no %s\n", t->id, name), exit(2);
    return a;
}

static void rms_norm(struct test *t) {
    struct array *x = need(t, "x"), *scale = need(t, "scale"), *dy = need(t, "dy"), *dh = find(t, "dh");
    struct array *residual = find(t, "residual"), *y = need(t, "y"), *dx = need(t, "dx"), *h = find(t, "h");
    struct array *inverses = need(t, "inverse_rms"), *dscale = need(t, "dscale");
    static double sum[8192], row[8192];
    for (int j = 0; j < t->n; j++) sum[j] = 0;
    for (int start = 0; start < x->size; start += t->n) {
        STATISTIC square = 0;
        double inner = 0;
        for (int j = 0, i = start; j < t->n; j++, i++) {
            row[j] = residual ? rounded((double)x->values[i] + residual->values[i], x->bits) : x->values[i];
            if (h) h->values[i] = (float)row[j];
            square += (STATISTIC)row[j] * (STATISTIC)row[j];
        }
        double mean = square / (STATISTIC)t->n;
        double inverse = 1 / (eps_outside ? sqrt(mean) + t->eps : sqrt(mean + t->eps));
        inverses->values[start / t->n] = (float)inverse;
        for (int j = 0, i = start; j < t->n; j++, i++) {
            double gain = t->offset + (double)scale->values[j];
            row[j] *= inverse;
            y->values[i] = (float)rounded((float)((t->norm ? rounded(row[j], t->norm) : row[j]) * gain), y->bits);
            inner += dy->values[i] * gain * row[j] / t->n;
            sum[j] += dy->values[i] * row[j];
        }
        for (int j = 0, i = start; j < t->n; j++, i++) {
            double u = dy->values[i] * (t->offset + (double)scale->values[j]);
            dx->values[i] = (float)rounded((u - row[j] * inner) * inverse + (dh ? dh->values[i] : 0), x->bits);
        }
    }
    for (int j = 0; j < t->n; j++) dscale->values[j] = (float)rounded(sum[j], scale->bits);
}

static int is_wrong(const struct array *a) {
    for (int j = 0; a->is_output && a->is_used && j < a->count; j++) {
        double sum = 0; /* of one element, where a block has one */
        for (int i = 0; i < a->block; i++) sum += (i + 1.0) * a->values[j * a->block + i];
        if (isnan(a->lo[j]) ? !isnan(sum) : !(a->lo[j] <= sum && sum <= a->hi[j])) return 1;
    }
    return 0;
}

int main(int count, char **arguments) {
    static struct test t;
    int tests = 0, judged = 0, wrong = 0;
    eps_outside = count > 1 && !strcmp(arguments[1], "wrong");
    if (count < 3 || (!eps_outside && strcmp(arguments[1], "right")))
        return fprintf(stderr, "usage: %s right|wrong vectors/VARIANT.DTYPE.txt ...\n", arguments[0]), 2;
    for (int i = 2; i < count; i++) {
        char name[48];
        int left = -1;
        FILE *file = fopen(arguments[i], "r");
        if (!file) return perror(arguments[i]), 2;
        if (fscanf(file, "rmsnorm vectors 1 %47s %d", name, &left) != 2) left = -1;
        for (; left > 0 && next(file, &t); left--, tests++) {
            rms_norm(&t);
            for (struct array *a = t.arrays; a < t.arrays + t.count; a++) {
                judged += a->is_output && a->is_used;
                if (is_wrong(a)) wrong += printf("%s %d %s %s\n", name, t.id, t.flag, a->name) > 0;
            }
        }
        if (left) return fprintf(stderr, "%s: no vectors in format 1, or cut off\n", arguments[i]), 2;
        fclose(file);
    }
    fprintf(stderr, "%d tests, %d outputs judged, %d wrong\n", tests, judged, wrong);
    return judged ? wrong > 0 : 2;
}
