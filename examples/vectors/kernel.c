/* Two kernels, one of which is wrong, judged by files of vectors/:
 *
 *     cc -std=c99 -O2 -o judge examples/vectors/kernel.c -lm
 *     ./judge right vectors/llama.*.txt        prints nothing
 *     ./judge wrong vectors/llama.*.txt        prints a line for each output that is wrong
 *
 * -DSTATISTIC=float makes the right kernel one that overflows where x is large. */
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

static void rms_norm(struct test *t) {
    struct array *x = find(t, "x"), *scale = find(t, "scale"), *dy = find(t, "dy"), *dh = find(t, "dh");
    struct array *residual = find(t, "residual"), *y = find(t, "y"), *dx = find(t, "dx"), *h = find(t, "h");
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
        find(t, "inverse_rms")->values[start / t->n] = (float)inverse;
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
    for (int j = 0; j < t->n; j++) find(t, "dscale")->values[j] = (float)rounded(sum[j], scale->bits);
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
    int wrong = 0;
    eps_outside = count > 1 && !strcmp(arguments[1], "wrong");
    for (int i = 2; i < count; i++) {
        char name[48];
        int tests = -1;
        FILE *file = fopen(arguments[i], "r");
        if (file && fscanf(file, "rmsnorm vectors 1 %47s %d", name, &tests) != 2) tests = -1;
        for (; tests > 0 && next(file, &t); tests--) {
            rms_norm(&t);
            for (struct array *a = t.arrays; a < t.arrays + t.count; a++)
                if (is_wrong(a)) wrong += printf("%s %d %s %s\n", name, t.id, t.flag, a->name) > 0;
        }
        if (tests) return fprintf(stderr, "%s: no vectors in format 1, or cut off\n", arguments[i]), 2;
        fclose(file);
    }
    return count < 3 ? 2 : wrong > 0;
}
